# Jetty, without an application. $1: whether it takes its listener as descriptor 0.
cat > {dir}/$$.xml <<END
<?xml version="1.0"?>
<!DOCTYPE Configure PUBLIC "-//Jetty//Configure//EN" "https://www.eclipse.org/jetty/configure_9_3.dtd">
<Configure id="Server" class="org.eclipse.jetty.server.Server">
  <Call name="addConnector"><Arg>
    <New class="org.eclipse.jetty.server.ServerConnector">
      <Arg name="server"><Ref refid="Server"/></Arg>
      <Set name="host">{host}</Set>
      <Set name="port">{port}</Set>
      <Set name="inheritChannel">$1</Set>
    </New>
  </Arg></Call>
</Configure>
END
classes=$(echo /usr/share/jetty9/lib/*.jar /usr/share/java/servlet-api.jar | tr ' ' :)
exec java -Xmx64m -cp "$classes" org.eclipse.jetty.xml.XmlConfiguration {dir}/$$.xml
