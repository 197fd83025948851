{{- define "wakeone.selector" -}}
app.kubernetes.io/name: wakeone-agent
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "wakeone.labels" -}}
{{ include "wakeone.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "wakeone.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}-agent
{{- end }}
