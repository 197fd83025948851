# Tomcat, without an application. $1: whether it takes its listener as descriptor 0.
base={dir}/$$
mkdir -p $base/conf $base/logs $base/temp $base/webapps/ROOT
cp /usr/share/tomcat10/etc/web.xml /usr/share/tomcat10/etc/catalina.properties $base/conf/
cat > $base/conf/server.xml <<END
<Server port="-1">
  <Service name="Catalina">
    <Connector address="{host}" port="{port}" useInheritedChannel="$1" maxKeepAliveRequests="-1"/>
    <Engine name="Catalina" defaultHost="localhost"><Host name="localhost" appBase="webapps"/></Engine>
  </Service>
</Server>
END
exec java -Xmx64m -Dcatalina.home=/usr/share/tomcat10 -Dcatalina.base=$base -Djava.io.tmpdir=$base/temp \
    -cp /usr/share/tomcat10/bin/bootstrap.jar:/usr/share/tomcat10/bin/tomcat-juli.jar \
    org.apache.catalina.startup.Bootstrap start
